"""Whole numbers of a file, with bounds: no reader counts to what a damaged one says."""

from typing import Annotated

from msgspec import Meta

MOST = 2**63 - 1
Int = Annotated[int, Meta(ge=-MOST - 1, le=MOST)]
Count = Annotated[int, Meta(ge=0, le=MOST)]
