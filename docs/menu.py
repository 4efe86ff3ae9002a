"""Adds the pages of methods and personalisations to the menu of the site.

A hook of mkdocs. ``docs/reference.py`` makes the pages from the catalogue, so a new
method needs no line in ``mkdocs.yml``.
"""

from mkdocs.config.defaults import MkDocsConfig

from knnper.strategies.catalogue import METHODS, PERSONALIZERS

SECTION = "Methods"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the page of each method and personalisation to the section of methods."""
    assert config.nav is not None
    (section,) = (entry[SECTION] for entry in config.nav if SECTION in entry)
    section += [f"methods/{name}.md" for name in sorted(METHODS)]
    section += [f"personalization/{name}.md" for name in sorted(PERSONALIZERS)]
    return config
