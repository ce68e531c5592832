"""The data-plane bench: gateway CPU per request beside nginx, measured in the same run."""
