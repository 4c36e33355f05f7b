"""SkyRL: its settings under their own names."""

from arctic_platform.integrations.skyrl.settings import skyrl_settings

__all__ = ["skyrl_settings"]
