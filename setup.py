"""Build of the link to this clone, `pip install --editable .`; a wheel or an sdist is refused in one sentence.

A wheel would put core, tools and our other folders under these names into its user's environment. One package `feynrl`
cannot hold them: its modules would import one another as feynrl.core, those of the clone as core.
"""

import sys
from pathlib import Path

from setuptools import setup

REFUSED = (
    "FeynRL is used from its clone and builds no package, because its folders (core, configs, rewards, ...) would take"
    " those names in your environment: git clone it, and say `make install` or `pip install --editable .` there."
)
# Commands of setuptools, and what pip calls them: it asks for the wheel itself only after it has fetched gigabytes.
WHEEL = {"bdist_wheel", "get_requires_for_build_wheel", "prepare_metadata_for_build_wheel", "install"}
SDIST = {"sdist", "get_requires_for_build_sdist"}

if (WHEEL | SDIST) & {*sys.argv, *sys.orig_argv}:
    sys.exit(REFUSED)
# Not beside this file: that folder is on the path of every run, and old entry points in it would be found first.
Path("build").mkdir(exist_ok=True)
setup(options={"egg_info": {"egg_base": "build"}})
