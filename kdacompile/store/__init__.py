"""Files on disk: written atomically, named after the source that wrote them."""
