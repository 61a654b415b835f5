"""Command line: `python -m train classify …` and `python -m train demo`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tyro
from rich.console import Console
from rich.markup import escape

from train import classify, demo
from train.config import Classify, Demo
from train.display import say
from train.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for bad input, 130 if interrupted."""
    console, complaints = Console(), Console(stderr=True)
    config: Classify | Demo | None = None
    try:
        config = tyro.extras.subcommand_cli_from_dict(
            {"classify": Classify, "demo": Demo},
            prog="python -m train",
            description="Sample training loops for normlib.",
            args=list(arguments) if arguments is not None else None,
        )
        if isinstance(config, Demo):
            demo.run(config, console=console)
        else:
            summary = classify.run(config, console=console)
            say(
                console,
                f"Test error {summary['test_error']:.2f} % after {summary['seconds']:.1f} s; written to {config.out}.",
            )
    except UserError as error:
        complaints.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        hint = " The same command with --resume continues from the latest checkpoint."
        say(complaints, "Interrupted." + (hint if isinstance(config, Classify) else ""))
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
