"""What setup.cfg cannot say of the build: on a package index the links of the README name the project's home."""

import configparser
import re
from pathlib import Path

from setuptools import setup

here = Path(__file__).parent
declared = configparser.ConfigParser()
declared.read(here / "setup.cfg", encoding="utf-8")
readme = (here / "README.md").read_text(encoding="utf-8")
files = declared["metadata"]["url"] + "/blob/main"
setup(
    long_description=re.sub(r"\]\((?!\w+:|#)([^)]+)\)", rf"]({files}/\1)", readme),
    long_description_content_type="text/markdown",
)
