"""One weight sync between two processes, from the first word to the last.

    receiver                                        sender
    offer: address, one-time token   -- backend -->
                                     <------------  hello: token
                                     <------------  manifest, weight version
    agreed: manifest, mechanism      ------------>  (both log the names)
                                     <------------  ready
                                     <------------  buckets; each is acknowledged
                                     <------------  digests
    equal                            ------------>
                                     <------------  commit
    swap the new weights in, done    ------------>

Until `commit` the receiver's weights are the old ones, whole. With `low_memory` they are written bucket by bucket, and
a receiver that fails on the way must not be used until a sync has succeeded. No wait is longer than `timeout_seconds`
of silence, and whoever fails tells the other why.
"""

from arctic_platform.rl.config import WeightSyncConfig
from arctic_platform.rl.weight_sync.offer import SyncOffer
from arctic_platform.rl.weight_sync.receiving import ModelSink, Receiver, WeightSink
from arctic_platform.rl.weight_sync.sending import follow, refuse, send_weights

__all__ = ["ModelSink", "Receiver", "SyncOffer", "WeightSink", "follow", "open_receiver", "refuse", "send_weights"]


def open_receiver(
    settings: WeightSyncConfig, sink: WeightSink, *, low_memory: bool = False, host: str = "127.0.0.1"
) -> Receiver:
    """A receiver for any number of syncs, one after the other; nothing listens until an offer is asked for.

    host: where senders reach this machine; an address of its own.
    """
    return Receiver(settings, sink, low_memory=low_memory, host=host)
