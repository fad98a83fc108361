"""The documentation site: pages of `docs/`, and reference pages that are generated from the code."""
