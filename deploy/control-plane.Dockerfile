# The control plane: HTTP, store, reconciler, exporter. No torch: plans are made by a Ray task on a worker's image.
FROM python:3.11-slim-bookworm
WORKDIR /srv/dmuon
COPY pyproject.toml constraints.txt README.md ./
COPY orchestrator orchestrator
COPY worker worker
COPY dmuon_runtime dmuon_runtime
COPY dashboards dashboards
RUN pip install --no-cache-dir -c constraints.txt . \
 && python -c "import importlib.util as u; assert u.find_spec('torch') is None, 'torch has no place in this image'" \
 && useradd --create-home --uid 10001 dmuon \
 && install -d -o dmuon -g dmuon /var/lib/dmuon /var/lib/dmuon/logs /var/lib/dmuon/reports /var/lib/dmuon/checkpoints
USER dmuon
ENV DMUON_STATE_DIR=/var/lib/dmuon
VOLUME /var/lib/dmuon
EXPOSE 8470
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8470/healthz', timeout=2)"]
ENTRYPOINT ["dmuonctl"]
CMD ["up"]
