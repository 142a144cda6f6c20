"""Configs of other tools, read and written: DeepSpeed, accelerate, LLaMA-Factory, transformers.

Each format has a table of its keys with what becomes of them here; `formats.py` finds the format of
a file, reads it and writes another. Knows no torch and none of the tools' own code.
"""
