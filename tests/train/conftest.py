"""Without the extra `train`, only the tests of what needs jax, flax and optax alone are collected."""

from importlib.util import find_spec

collect_ignore = []
if any(find_spec(name) is None for name in ("matplotlib", "orbax.checkpoint", "rich", "sklearn", "tyro")):
    collect_ignore = ["test_train_cli.py", "test_train_readers.py", "test_train_resume.py"]
