"""What is light stays light: neither the client nor the command line may load torch."""

import subprocess
import sys

import pytest

LIGHT = [
    "from arctic_platform.rl import ArcticRLClientConfig, create_arctic_rl_client",
    "import arctic_platform.rl.transports.ray",
    "import arctic_platform.cli",
    "import arctic_platform.rl.loop",
    "import arctic_platform.rl.report",
    "from arctic_platform.rl.recipe import load_recipe; load_recipe('recipes/tiny.yaml')",
]


@pytest.mark.parametrize("code", LIGHT)
def test_importing_it_loads_no_torch(code):
    check = f"import sys\n{code}\nassert not {{'torch', 'transformers', 'reasoning_gym'}} & set(sys.modules)\n"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_client_imports_where_torch_is_not_installed():
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from arctic_platform.rl import ArcticRLClientConfig, create_arctic_rl_client, RolloutBatch\n"
        "ArcticRLClientConfig(model='somewhere')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
