"""Every option of the SDK: one class, one loader, and what people already have from elsewhere.

`fields` holds the options themselves, `parse` how their values are written, `load` where they come from, also from the
configuration of NVIDIA's extension, `options` the command line. The torch-free monitor imports this package, so it
needs nothing but attrs until a file is read.
"""

from __future__ import annotations

from resilience_sdk.core.settings.fields import Settings, settings_from_json
from resilience_sdk.core.settings.load import load_settings, override_settings

__all__ = ["Settings", "load_settings", "override_settings", "settings_from_json"]
