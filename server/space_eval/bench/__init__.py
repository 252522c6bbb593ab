"""`spaceserve bench`: throughput and latency under load, of any OpenAI or TGI endpoint."""
