# One image for every service: they differ only in the command that compose gives them.
# No torch by default. Nodes that train: docker build --build-arg EXTRAS=train .
# What is installed is locked, by the hash of every file (locks/). The base image by its tag, or by a digest:
# --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY locks locks
COPY scripts/install scripts/install
RUN python -m venv /opt/build && scripts/install /opt/build/bin/python build
COPY . .
RUN /opt/build/bin/python -m pip --disable-pip-version-check wheel --quiet --no-index --no-deps --no-build-isolation \
    --wheel-dir /wheels .

FROM ${PYTHON_IMAGE}

ARG EXTRAS=""
ENV PATH=/opt/stoker/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

RUN useradd --system --create-home --home-dir /home/stoker --shell /usr/sbin/nologin stoker \
    && python -m venv /opt/stoker

# The dependencies are a layer of their own, rebuilt only when they change.
WORKDIR /src
COPY locks locks
COPY scripts/install scripts/install
RUN scripts/install python base postgres redis $(printf '%s' "$EXTRAS" | tr , ' ')

COPY scripts/healthcheck /usr/local/bin/stoker-healthcheck
COPY --from=build /wheels /wheels
# A volume that is mounted on one of these folders takes its owner from it.
RUN pip install --quiet --no-index --no-deps /wheels/*.whl && rm -rf /src \
    && install -d -o stoker -g stoker /var/lib/stoker /var/lib/stoker/output \
    && install -d -o stoker -g stoker -m 0700 /var/lib/stoker/session

USER stoker
WORKDIR /var/lib/stoker
# Compose sets STOKER_PORT per service, and `stoker start --head` listens on 7600. Every service answers /readyz
# once it can do its work.
HEALTHCHECK --interval=5s --timeout=4s --start-period=30s --retries=6 CMD ["stoker-healthcheck"]
CMD ["stoker", "--help"]
