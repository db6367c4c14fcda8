"""Tests of the add-ons, one folder each: each goes when its add-on does."""
