"""What all sides of the system share: settings, data, models, transport, commands."""

__version__ = "0.1.0"
