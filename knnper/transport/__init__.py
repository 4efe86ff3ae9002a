"""How records travel: one codec, its carriers, one polling grid.

Every use of Flower and Ray passes through here first, so this is where they are told to
send and look up nothing. Flower reads it when it is imported.
"""

import os

os.environ.update(
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    # Workers that reserve no GPU: what a later Ray does anyway, without its warning.
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
)
# With Ray's default of 15, anything else on the machine takes the workers' time, and a
# simulation is many times slower beside it. Who wants that starts it with `nice`.
os.environ.setdefault("RAY_worker_niceness", "0")
