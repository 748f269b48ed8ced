"""Sections of a configuration, a module for each subject; `config.schema` puts them together."""
