"""A server in mode `dynamic`: a request with n images is one batch, and its log says so."""

import pytest

from support.server_process import serving

pytestmark = pytest.mark.timeout(150)  # starting a server may take long


def test_a_request_of_many_images_is_one_batch_and_the_last_window_is_told_at_the_end() -> None:
    flags = ("--batching-max-size", "4", "--enable-batching-metrics", "--num-gpus", "1")
    with serving(*flags) as server:
        assert len(server.draw(n=6).json()["data"]) == 6
        assert server.draw().status_code == 200
        server.signal()
        server.wait()
        said = [line.split(" INFO ")[-1] for line in server.stderr.splitlines() if "atch" in line]

    assert [line.split(", queue_wait")[0].split(", wait_avg")[0] for line in said[1:]] == [
        "Batch admission enabled: user_max=4, device_memory=0.0GiB, rules=0",
        "Dynamic batch metrics enabled; logging summary every 5 dispatches.",
        "Dynamic batch dispatch: requests=1, outputs=6/4, user_max_outputs=4",
        "Dynamic batch dispatch: requests=1, outputs=1/4, user_max_outputs=4",
        "Dynamic batch stats (last 2 dispatches): avg_requests=1.00, avg_outputs=3.50, "
        "merged_rate=0.0%, full_rate=50.0%, utilization=87.5%",
    ]
    assert said[0].endswith("the settings choose batching mode dynamic")
