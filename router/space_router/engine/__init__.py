"""All requests of this router, from the door to the last token: queue, pages, schedule, streams. Torch-free."""
