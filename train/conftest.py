"""Without the extra `train` its modules cannot be imported, and their examples are not collected."""

from importlib.util import find_spec

collect_ignore_glob = []
if any(find_spec(name) is None for name in ("matplotlib", "orbax.checkpoint", "rich", "sklearn", "tyro")):
    collect_ignore_glob = ["*.py"]
