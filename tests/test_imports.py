"""What is light stays light: neither the client nor the command line may load torch, ray or a web server."""

import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "transformers",
    "reasoning_gym",
    "ray",
    "fastapi",
    "starlette",
    "uvicorn",
    "prometheus_client",
    "vllm",
}
LIGHT = [
    "from arctic_platform.rl import ArcticRLClientConfig, create_arctic_rl_client",
    "import arctic_platform.rl.transports.http",
    "import arctic_platform.rl.transports.ray",
    "import arctic_platform.cli",
    "import arctic_platform.rl.loop",
    "import arctic_platform.rl.report",
    "from arctic_platform.rl.recipe import load_recipe; load_recipe('recipes/tiny.yaml')",
]


@pytest.mark.parametrize("code", LIGHT)
def test_importing_it_loads_nothing_heavy(code):
    check = f"import sys\n{code}\nloaded = {HEAVY} & set(sys.modules)\nassert not loaded, loaded\n"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_client_imports_where_only_the_base_install_is():
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({HEAVY}))\n"
        "from arctic_platform.rl import ArcticRLClientConfig, create_arctic_rl_client, RolloutBatch\n"
        "ArcticRLClientConfig(model='somewhere')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
