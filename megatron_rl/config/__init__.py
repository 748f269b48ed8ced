"""Configuration of a run, as typed, frozen values: every key is a dataclass field that describes itself."""
