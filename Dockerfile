# One image for ZooKeeper and the broker: `metamq zookeeper` or `metamq broker`, as docker-compose.yml tells each container.
FROM python:3.11-slim-bookworm AS build
# The image needs no pip, so the one of the base image installs. First what metamq needs, which changes seldom.
RUN python3 -m venv --without-pip /opt/metamq
WORKDIR /source
COPY pyproject.toml ./
RUN python3 -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        extras = project["optional-dependencies"]; \
        print(*project["dependencies"], *extras["local"], *extras["lz4"], *extras["zstd"], sep="\n")' >requirements.txt \
    && python3 -m pip --python /opt/metamq/bin/python install --no-cache-dir --disable-pip-version-check -r requirements.txt
COPY . .
RUN python3 -m pip --python /opt/metamq/bin/python install --no-cache-dir --disable-pip-version-check --no-deps .
# The jars of ZooKeeper, into the image: a container needs no way out to the internet. They come from Maven Central, or
# `--build-arg METAMQ_MAVEN=<mirror>`, and are checked by the SHA-512 in zk/jars.py. -P: metamq as installed, not ./metamq.
ARG METAMQ_MAVEN=
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
