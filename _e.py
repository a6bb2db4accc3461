import vllm; print(vllm.__version__)
from vllm.v1.core.sched.scheduler import Scheduler
from benchmarks.stepper import *
def state(block):
    return MambaSpec(block_size=block, shapes=((16,),), dtypes=(torch.float32,), mamba_cache_mode="align")
for budget, prompt, block in ((512,300,128),(512,2000,128),(500,2000,128),(500,1000,384),(200,1000,128),(2048,9000,528),(2048,4000,784)):
    s=Stepper({},groups=[full_attention(block),state(block)],scheduler=Scheduler,max_num_batched_tokens=budget,max_model_len=8192 if prompt<8192 else 8192)
    steps=[]
    s.look=lambda o: steps.append(o.total_num_scheduled_tokens)
    if prompt<8192:
        s.add([i%400+1 for i in range(prompt)],1); s.run(); print(budget,prompt,block,steps)
s=Stepper({},scheduler=Scheduler,groups=[full_attention(128)])
for i in range(3): s.add([i%400+1 for i in range(300)],2)
s.run(); print(s.shared)
