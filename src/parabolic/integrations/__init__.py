"""Adapters to other libraries. Each module needs its library and is imported by its full name."""
