# One image for every service: they differ only in the command that compose gives them.
# No torch by default. Nodes that train: docker build --build-arg EXTRAS=train .
FROM python:3.11-slim

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
COPY pyproject.toml constraints.txt ./
RUN python -c "import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = ['postgres', 'redis', *filter(None, sys.argv[1].split(','))]; \
print(*p['dependencies'], *(d for e in extras for d in p['optional-dependencies'][e]), sep='\n')" \
    "$EXTRAS" > /tmp/requirements.txt \
    && pip install --quiet -c constraints.txt -r /tmp/requirements.txt \
    && rm /tmp/requirements.txt

COPY . .
# A volume that is mounted on the folder for output takes its owner from it.
RUN pip install --quiet --no-deps . && rm -rf /src/* \
    && install -d -o stoker -g stoker /var/lib/stoker /var/lib/stoker/output

USER stoker
WORKDIR /var/lib/stoker
# Compose sets STOKER_PORT per service, and `stoker start --head` listens on 7600. Every service answers /readyz
# once it can do its work.
# By bash alone: a Python every five seconds would cost more than an idle gcs itself.
HEALTHCHECK --interval=5s --timeout=4s --start-period=30s --retries=6 \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/${STOKER_PORT:-7600} && printf 'GET /readyz HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n' >&3 && read -r -t 3 _ code _ <&3 && [ \"$code\" = 200 ]"]
CMD ["stoker", "--help"]
