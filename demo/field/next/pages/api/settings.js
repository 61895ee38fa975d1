import { change } from '../../lib/settings';

export default function settings(request, response) {
  change(request.body.title);
  response.send('changed');
}
