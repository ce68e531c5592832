# One image for gateways and fake nodes: an installed wheel in a venv, no pip, no source tree.

FROM python:3.11-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src

# Dependencies first: this layer is made anew only when pyproject.toml or constraints.txt changes.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt \
 && python -m venv --without-pip /opt/leaseway \
 && pip --python /opt/leaseway/bin/python install -c constraints.txt -r requirements.txt

# lua/ and config/leaseway.yaml are files of the wheel (force-include), so both are needed here.
COPY README.md LICENSE ./
COPY config/leaseway.yaml config/leaseway.yaml
COPY lua lua
COPY app app
RUN pip wheel --no-deps --wheel-dir /dist . \
 && pip --python /opt/leaseway/bin/python install --no-deps --no-index /dist/*.whl

FROM python:3.11-slim
LABEL org.opencontainers.image.title="leaseway" \
      org.opencontainers.image.description="A Redis-coordinated cluster of LLM inference gateways" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/leaseway /opt/leaseway
ENV PATH=/opt/leaseway/bin:$PATH
# A number, so that Kubernetes' runAsNonRoot can check it; the user needs no name and no home.
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["leaseway"]
# Mount the settings there; without the file it says so and ends.
CMD ["serve", "--config", "/etc/leaseway/leaseway.yaml"]
