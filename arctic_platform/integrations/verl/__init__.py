"""verl: its settings under their own names."""

from arctic_platform.integrations.verl.settings import verl_settings

__all__ = ["verl_settings"]
