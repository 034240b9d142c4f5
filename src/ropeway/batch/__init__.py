"""Work that outlives a process: files, batches of requests, and the journal that remembers which are answered."""
