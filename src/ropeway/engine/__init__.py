"""Submit, abort and step over token ids: the engine, its runner, and the thread that drives them."""
