"""The rank page: what a rank is doing, in shared memory, readable while the rank hangs and after it died."""

from resilience_sdk.rank_page.control import ControlWords
from resilience_sdk.rank_page.directory import (
    check_private,
    job_page_directory,
    page_directories,
    page_stem,
    parse_stem,
)
from resilience_sdk.rank_page.reader import (
    LaneView,
    OpenSection,
    PageReader,
    Passes,
    RankSnapshot,
    snapshot_to_json,
)
from resilience_sdk.rank_page.writer import RankPage

__all__ = [
    "ControlWords",
    "LaneView",
    "OpenSection",
    "PageReader",
    "Passes",
    "RankPage",
    "RankSnapshot",
    "check_private",
    "job_page_directory",
    "page_directories",
    "page_stem",
    "parse_stem",
    "snapshot_to_json",
]
