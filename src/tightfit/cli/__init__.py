"""The command line: one file per verb, and one set of keys for YAML files and flags."""
