# docker build -t ropeway . && docker run --rm -p 127.0.0.1:8000:8000 ropeway
# For other people's use: docs/serving.md, In front of people.
FROM debian:bookworm-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY native native
COPY scripts scripts
COPY src src
RUN python3 -m venv /opt/ropeway && /opt/ropeway/bin/pip install --no-cache-dir .
# The default model travels in the image, so that a container starts without a network.
ENV XDG_CACHE_HOME=/opt/cache
RUN /opt/ropeway/bin/ropeway models fetch

FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 libstdc++6 \
    && rm -rf /var/lib/apt/lists/* && useradd --create-home ropeway
COPY --from=build /opt/ropeway /opt/ropeway
COPY --from=build --chown=ropeway /opt/cache /opt/cache
ENV PATH=/opt/ropeway/bin:$PATH XDG_CACHE_HOME=/opt/cache
USER ropeway
EXPOSE 8000
# exec form: SIGTERM reaches the server, which lets answers finish for --shutdown-timeout seconds and exits 0.
ENTRYPOINT ["ropeway"]
CMD ["serve", "--host", "0.0.0.0"]
