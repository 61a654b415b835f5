"""Errors that a person can act on: the command line prints them without a traceback."""


class UserError(Exception):
    """Something the user gave cannot be used: an argument, a file or a directory."""


class DataError(UserError):
    """A data file is missing, malformed or larger than the limit."""


class ConfigError(UserError):
    """An argument, or a combination of arguments, cannot be run."""
