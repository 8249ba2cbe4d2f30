# One image for ZooKeeper and the broker: `metamq zookeeper` or `metamq broker`, as docker-compose.yml tells each container.
FROM python:3.11-slim-bookworm AS build
RUN python3 -m venv /opt/metamq
WORKDIR /source
COPY . .
RUN /opt/metamq/bin/pip install --no-cache-dir --disable-pip-version-check ".[local,lz4,zstd]"
# The jars of ZooKeeper, into the image: a container needs no way out to the internet. -P: metamq as installed, not ./metamq.
RUN XDG_CACHE_HOME=/opt/cache /opt/metamq/bin/python -P -c "from metamq.zk.jars import find_jars; find_jars()" \
    && mv /opt/cache/metamq/zookeeper-* /opt/metamq/zookeeper

FROM python:3.11-slim-bookworm
RUN groupadd --system --gid 8123 metamq \
    && useradd --system --uid 8123 --gid metamq --no-create-home --home-dir /var/lib/metamq metamq \
    && install --directory --owner metamq --group metamq /var/lib/metamq /etc/metamq
COPY --from=build /opt/metamq /opt/metamq
ENV PATH=/opt/metamq/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    METAMQ_ZOOKEEPER_JARS=/opt/metamq/zookeeper \
    METAMQ_BROKER_HOST=0.0.0.0 \
    METAMQ_BROKER_DATA=/var/lib/metamq/broker
USER metamq
WORKDIR /var/lib/metamq
VOLUME /var/lib/metamq
# ZooKeeper; the broker's clients; /metrics, /healthz and /readyz.
EXPOSE 2181 8123 8120
# A broker is ready once its logs are recovered and it is registered in ZooKeeper.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8120/readyz', timeout=2)"]
# Settings come from METAMQ_BROKER_… variables, or from a file: `metamq broker --config /etc/metamq/broker.toml`.
ENTRYPOINT ["metamq"]
CMD ["broker"]
