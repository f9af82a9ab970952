"""`mmcache config schema`: the configuration's keys as a JSON schema.

Owns: what may be written for a size, a share or a duration, in a schema's terms.
Does not own: the keys, which come from :mod:`tiered_mmcache.config`.
"""

from __future__ import annotations

from typing import Any

from tiered_mmcache.config import CacheConfig

__all__ = ["configuration_schema"]

_NUMBER = r"[0-9]{1,20}(\.[0-9]{1,20})?"
_SIZE_UNITS = "B|[KMGTP]iB|[KMGTP]B|kB"
_SHARES = {"HostConfig.max_size", "DiskConfig.max_size", "DiskConfig.write_buffer"}
_SIZES = {
    "HotConfig.max_size",
    "HotConfig.clean_ahead",
    "HostConfig.prefetch",
    "TraceConfig.max_size",
    *_SHARES,
}
_DURATIONS = {
    "HostConfig.demote_wait",
    "DiskConfig.read_timeout",
    "DiskConfig.close_timeout",
    "MetricsConfig.interval",
}


def configuration_schema() -> dict[str, Any]:
    """The schema of the whole file."""
    schema = CacheConfig.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Configuration of tiered_mmcache"
    for name, section in schema["$defs"].items():
        for key, described in section.get("properties", {}).items():
            section["properties"][key] = _as_written(f"{name}.{key}", described)
    for section in (schema, *schema["$defs"].values()):
        section["description"] = section.get("description", "").partition("\n\n")[0]
    return schema


def _as_written(key: str, described: dict[str, Any]) -> dict[str, Any]:
    """What stands in the file, in place of what it is read as."""
    kept = {"default": described["default"]} if described.get("default") is not None else {}
    if key in _SIZES:
        units = _SIZE_UNITS + ("|%" if key in _SHARES else "")
        return {"anyOf": [{"type": "integer", "minimum": 0}, _text(f"({units})?")], **kept}
    if key in _DURATIONS:
        number = {"type": "number", "minimum": 0, "maximum": 3600}
        return {"anyOf": [number, _text("(ms|s|min)")], **kept}
    if key == "HostConfig.page_locked":  # YAML 1.1 reads a bare on or off as a truth value
        return {"enum": ["auto", "on", "off", True, False], **kept}
    return {field: value for field, value in described.items() if field != "format"}


def _text(units: str) -> dict[str, str]:
    return {"type": "string", "pattern": f"^{_NUMBER} ?{units}$"}
