"""Sample training loops that use normlib as a user would; run from a clone of the repository."""
