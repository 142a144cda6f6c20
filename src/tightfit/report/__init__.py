"""Tables for people and JSON for programs, from plans and measured runs."""
