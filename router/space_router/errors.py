"""What can go wrong before or beside a request, as a tree; each message names the bound, the value and the cure."""


class RouterError(Exception):
    """Anything this package raises on purpose."""


class ConfigError(RouterError):
    """A flag, environment variable or file that says how to serve is not usable."""
