"""Load and measurement: throughput and latency stated together, against any OpenAI-compatible server.

`workload` makes the requests, `client` speaks HTTP and reads token streams, `load` paces requests and records them,
`report` turns records into figures, `plot` draws them. `step` measures an engine in this process, part by part; nothing
else here knows how a server works inside.
"""
