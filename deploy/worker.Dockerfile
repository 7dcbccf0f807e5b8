# A Ray node that runs workers: the runtime, torch and transformers. EXTRAS=worker,quack for Hopper GPUs.
FROM python:3.11-slim-bookworm
ARG EXTRAS=worker
# The index that torch comes from: https://download.pytorch.org/whl/cpu for machines without a GPU, for example.
ARG TORCH_INDEX=
WORKDIR /srv/dmuon
COPY pyproject.toml constraints.txt README.md ./
COPY orchestrator orchestrator
COPY worker worker
COPY dmuon_runtime dmuon_runtime
COPY dashboards dashboards
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} ".[${EXTRAS}]" \
 && useradd --create-home --uid 10001 dmuon \
 && install -d -o dmuon -g dmuon /var/lib/dmuon /var/lib/dmuon/logs /var/lib/dmuon/reports /var/lib/dmuon/checkpoints
USER dmuon
ENV RAY_DISABLE_IMPORT_WARNING=1
ENTRYPOINT ["ray"]
