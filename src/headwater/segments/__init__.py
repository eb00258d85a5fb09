"""Where catalog and storage meet: blocks of events, flushes that append them, reads that verify them."""
