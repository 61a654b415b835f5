"""The pages about the simulator: their code runs, their tables are today's."""

import re
from pathlib import Path

import pytest

from sim_npu.measured import A2_ADD, B4_ADD
from sim_npu.profiles import SHIPPED
from sim_npu.validate import add_table, validation_text

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_code_of_the_page_runs_top_to_bottom(capsys):
    page = (DOCS / "simulator.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)

    namespace = {}
    for block in blocks:
        exec(compile(block, "docs/simulator.md", "exec"), namespace)

    assert len(blocks) >= 4 and "a model, not a measurement" in capsys.readouterr().out


@pytest.mark.parametrize(("cases", "limit"), [(A2_ADD, 0.05), (B4_ADD, 0.15)])
def test_the_validation_page_holds_todays_pipe_tables(cases, limit):
    page = (DOCS / "simulator_validation.md").read_text()

    assert "\n".join(add_table(cases, limit)) in page


def test_the_validation_page_holds_all_that_the_command_prints_today():
    page = (DOCS / "simulator_validation.md").read_text()

    assert f"```\n{validation_text()}\n```" in page


def test_the_validation_page_holds_todays_profile_constants():
    page = (DOCS / "simulator_validation.md").read_text()

    for (chip, op), fit in SHIPPED.items():
        row = f"| {chip} | {op or 'all'} | {fit.launch:.2f} | {fit.factor:.2f} | {fit.per_mb:.3f} | {fit.strength:g} |"
        assert row in page


def test_the_validation_page_gives_command_and_date():
    page = (DOCS / "simulator_validation.md").read_text()

    assert "python -m sim_npu validate" in page and re.search(r"20\d\d-\d\d-\d\d", page)
