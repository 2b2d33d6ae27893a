"""T3: recurrent networks in mixed precision: torch's under amp.init, then apex.RNN."""

import torch
import torch.nn.functional as F
from torch import nn

from apex import RNN, amp

device = "cuda" if torch.cuda.is_available() else "cpu"
amp_handle = amp.init()
for kind in (nn.RNN, nn.LSTM, nn.GRU):
    torch.manual_seed(0)
    x = torch.randn(5, 32, 4, device=device)
    y = x.sum((0, 2)).gt(0).long()  # the sign of the sum of a whole sequence
    rnn, head = kind(4, 16).to(device), nn.Linear(16, 2).to(device)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=1e-2)
    losses = []
    for _ in range(30):
        out, _ = rnn(x)
        loss = F.cross_entropy(head(out[-1]), y)
        optimizer.zero_grad()
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"nn.{kind.__name__:4}    output {out.dtype}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")

# Those of apex.RNN keep their states from one piece of a text to the next.
torch.manual_seed(0)
letters = torch.arange(240, device=device).reshape(4, 10, 6).transpose(1, 2) % 5
rnn, head = RNN.mLSTM(5, 16, num_layers=2).to(device), nn.Linear(16, 5).to(device)
model = nn.ModuleList([rnn, head])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
losses = []
for _ in range(8):
    rnn.reset_hidden(10)  # zeros for 10 rows: the text begins
    for piece in letters:
        out, (hidden, cell) = rnn(F.one_hot(piece, 5).float())
        loss = F.cross_entropy(head(out[:-1]).flatten(0, 1), piece[1:].flatten())
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        rnn.detach_hidden()  # keep the states, end their history
        losses.append(loss.item())
print(f"RNN.mLSTM  hidden {hidden.dtype}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
