"""The real scheduler and the real speculation controller in virtual time: no model, no processes, seconds not hours.

Real: the router's engine (queue, fairness, prefix sharing, pages, preemption), the worker's admission, step planning,
prefill budget, cost model and controller, and the messages between them. Simulated: the seconds of a forward pass
(`machine`), which drafts are accepted (`texts`), the clients (`workload`), and time (`cluster`).

    experiment = Experiment(RidgeMachine(0.005, 0.0), DepthAcceptance((0.5,) * 5), workload, seconds=1.0)
    simulation = Simulation(experiment)
    summary = simulation.run()
    simulation.check()
"""
