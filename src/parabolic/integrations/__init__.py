"""The learners as other libraries know them: each file needs its library, and is imported by its own name."""
