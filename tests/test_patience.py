import time

from sglang_capture.patience import Patience


def test_what_one_request_waits_the_others_of_its_forward_do_not_have():
    patience = Patience(60.0)
    with patience.waiting() as seconds:
        assert seconds == 60.0
        time.sleep(0.01)
    with patience.waiting() as seconds:
        assert seconds <= 59.99
    patience.renew()
    with patience.waiting() as seconds:
        assert seconds == 60.0


def test_it_comes_to_an_end():
    patience = Patience(0.001)
    for _ in range(2):
        with patience.waiting():
            time.sleep(0.002)
    with patience.waiting() as seconds:
        assert seconds == 0.0
