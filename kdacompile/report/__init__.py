"""What was found, rewritten and left alone, and why: as data, text, JSON and a page."""
