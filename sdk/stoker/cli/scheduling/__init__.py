"""Commands about who runs where and when: explanations, placement groups, queues, simulations."""
