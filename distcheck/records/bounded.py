"""Whole numbers of a file, with bounds: no reader counts to what a damaged one says."""

from typing import Annotated

from msgspec import Meta

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
